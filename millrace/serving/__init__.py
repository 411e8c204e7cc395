"""The front's core: engines kept alive, requests carried over their deaths, tokens turned to text."""
