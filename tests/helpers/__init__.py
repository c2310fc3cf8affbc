"""What several test modules share: commands, processes, clients, servers, references; and scripts that tests start."""
