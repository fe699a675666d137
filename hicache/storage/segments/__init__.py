"""The ``segments`` store: append-only files of checked records."""
