"""The command `tokentape`: it composes the processes and holds no rule of its own."""
