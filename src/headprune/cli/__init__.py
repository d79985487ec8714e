"""The command line: parses options, calls the other rooms, prints what they return."""
