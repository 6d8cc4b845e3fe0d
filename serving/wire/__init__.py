"""What travels between front ends and replicas, and their calls to the cluster controller."""
