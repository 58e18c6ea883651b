"""The dashboard: one page for a person who watches agents, jobs, mailboxes, rejections and the pipeline."""
