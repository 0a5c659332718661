"""A token that goes to several experts of one node crosses to it once (DeepSeek-V3, section 3.2.2)."""
