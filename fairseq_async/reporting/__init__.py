"""What people look at: runs and simulations as pictures and tables."""
