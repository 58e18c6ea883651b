"""The schedule stream: messages that are posted again and again, by a cron expression or an interval."""
