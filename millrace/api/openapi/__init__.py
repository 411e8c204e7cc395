"""The description of every endpoint, made from the wire types themselves, and a page that shows it."""
