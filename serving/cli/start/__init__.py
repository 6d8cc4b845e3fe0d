"""What `kedge serve` does before it becomes `serve run`. Imports neither torch nor Ray before it is called."""
