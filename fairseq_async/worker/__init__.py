"""The worker side of asynchronous methods: joins a run, exchanges with the server, takes local steps."""
