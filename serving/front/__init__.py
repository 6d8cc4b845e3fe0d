"""The HTTP front end: its deployment, the protocols, and how a turn reaches its session's owner."""
