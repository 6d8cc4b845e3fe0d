"""The HTTP front end: its deployment, the protocols, and the way of a turn to its owner."""
