"""Accounts of Mosquitto: the password file and the ACL file, kept in step with jobs and agents."""
