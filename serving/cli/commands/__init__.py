"""The subcommands of `kedge`, one file each."""
