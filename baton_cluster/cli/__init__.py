"""The command `baton`: one module per subcommand, and what they share."""
