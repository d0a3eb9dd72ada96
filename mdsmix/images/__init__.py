"""Images of records: found, read with enough in flight, looked at before anything is trained on them, and never changed unasked."""
