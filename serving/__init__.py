"""HTTP and Ray Serve around the controllers and the engine, and the command line."""
