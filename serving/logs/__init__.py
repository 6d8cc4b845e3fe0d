"""The logs of front ends and replicas. They are in Ray Serve's own files, with the facts of the call."""
