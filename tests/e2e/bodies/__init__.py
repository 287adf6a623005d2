"""What the ranks of the end-to-end tests do; see launch.py."""
