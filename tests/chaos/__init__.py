"""Faults on purpose: schedules as data, a proxy that understands messages, a server that dies at any line."""
