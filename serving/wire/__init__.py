"""The messages between front ends and replicas, and the calls of both to the cluster controller."""
