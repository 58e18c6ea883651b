"""Programs and samples for people who look after a backbone or try it out. They import programs and below."""
