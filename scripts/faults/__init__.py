"""Fault injection: schedules, a proxy between workers and server, bad cables, a fuzzer, a server to attack."""
