"""The `kedge` command, its client and its load generator."""
