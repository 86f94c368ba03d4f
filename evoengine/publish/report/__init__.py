"""A ledger's problem on a GPU as one self-contained HTML page with charts."""
