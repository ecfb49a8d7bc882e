def grade(task, answer):
    return float(bool(answer.strip()))
