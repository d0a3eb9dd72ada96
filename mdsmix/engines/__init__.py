"""Who does the work units: processes of this machine, or whoever else keeps the protocol."""
