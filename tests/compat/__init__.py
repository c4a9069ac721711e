"""What released protocols say, as bytes, replayed against the code of today."""
