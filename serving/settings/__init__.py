"""What a config file may say."""
