"""What people look at: tables, progress, samples."""
