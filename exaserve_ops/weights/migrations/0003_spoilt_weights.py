from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ("weights", "0002_prewarm_note"),
    ]

    operations = [
        migrations.AddField(
            model_name="nodeweights",
            name="spoilt",
            field=models.BooleanField(
                default=False,
                help_text="Not to be had by fault of the weights, not of the node or its sources' absence.",
            ),
        ),
    ]
