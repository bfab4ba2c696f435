"""Silver and gold, one dataset a file: a function DataFrame → DataFrame and the SCHEMA that it ends in."""
