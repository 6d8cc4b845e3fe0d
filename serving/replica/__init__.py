"""The replica: its Ray Serve deployment, the turns it runs and the sessions it holds."""
