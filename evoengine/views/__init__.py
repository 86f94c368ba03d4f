"""What is shown of records, shared by the command line and the service: the shapes of JSON, and tables for people."""
