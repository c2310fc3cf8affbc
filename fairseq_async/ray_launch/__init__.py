"""A run on a Ray cluster: actors place, start again and find its processes; tensors stay on our own connections."""
