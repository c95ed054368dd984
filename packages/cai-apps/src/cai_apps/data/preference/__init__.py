"""Answers that are preferred to others: pairs of two answers, and answers judged one by one."""
