"""The doors and the programs around the log. Imports `schemas`, never `jobs`."""
