"""From a sample to token ids: chat templates, the user's own templates, and what is wrong with one."""
