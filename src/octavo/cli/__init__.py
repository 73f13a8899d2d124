"""The command line. `main` finds the command; each command's module is imported when it runs."""
