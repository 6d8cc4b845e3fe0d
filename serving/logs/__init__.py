"""What front ends and replicas log: in Ray Serve's own files, with what is known of the call."""
