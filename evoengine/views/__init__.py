"""What is shown of records: the JSON of the command line and of the service."""
