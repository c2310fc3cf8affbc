"""The programs of servers, each a process of its own."""
