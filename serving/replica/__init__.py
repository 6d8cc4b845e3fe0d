"""The replica: its deployment, its turns and the sessions that it holds."""
