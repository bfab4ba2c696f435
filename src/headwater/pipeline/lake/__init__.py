"""The lake's files: which there are, how they are written, merged and swept up."""
