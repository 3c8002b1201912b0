"""Reading data/ and accounting for what it holds: tables in, shares and intervals out."""
