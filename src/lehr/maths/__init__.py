"""Mathematical functions on arrays, each documented with its formula."""
