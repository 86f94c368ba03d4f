"""JSON of records, shared by the command line and the service."""
