"""The workers' side: one operator per decoder layer, the buffers that it reads, and what fills them each step."""
