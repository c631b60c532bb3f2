import django.db.models.deletion
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('serving', '0008_release_of_each'),
    ]

    operations = [
        migrations.AlterField(
            model_name='replica',
            name='release',
            field=models.ForeignKey(help_text='What it runs, for its whole life.', on_delete=django.db.models.deletion.PROTECT, related_name='replicas', to='serving.release'),
        ),
    ]
