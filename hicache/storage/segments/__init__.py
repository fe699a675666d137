"""The ``segments`` store, append-only files of checked records, and the ``nixl`` store on it."""
