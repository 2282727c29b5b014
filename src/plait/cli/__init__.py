"""Commands: thin. They parse, call and print."""
