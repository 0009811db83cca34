"""Calls that a card must compute rightly before it is trusted: mistakes of ports, and known defects of CANN."""
