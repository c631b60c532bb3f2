"""What weights are wanted where, and when to fetch them: computed, nothing is read or written."""
