"""The head and its loss by chunks of rows, against whole logits: values, derivatives, memory, and models of others."""
